"""Settings as frozen, keyword-only dataclasses. The strict YAML file of ``penstock train`` is these same classes.

One file for each section. May import: ``errors``, ``documents``.
"""

from penstock.config.batch import BatchConfig
from penstock.config.budget import INTERVAL, TIERS, Budget, Durability, GradDtype, Precision, Tier
from penstock.config.data import DataConfig, SourceConfig, TokenizerConfig, TokenizerTrainingConfig, ValidationConfig
from penstock.config.endurance import Endurance
from penstock.config.engine import EngineConfig, RunConfig
from penstock.config.lora import LoraConfig
from penstock.config.lr_schedule import DecayShape, LrScheduleConfig
from penstock.config.model import ModelConfig, asked_vocabulary, check_parts
from penstock.config.optimizer import OptimizerConfig, OptimizerName, Override
from penstock.config.quantities import parse_duration
from penstock.config.sizes import format_size, parse_size
from penstock.config.step import Family, StepConfig, StreamConfig, ZeroStage, fields_of
from penstock.config.train import EvaluateConfig, TrackerName, TrainConfig

__all__ = [
    "INTERVAL",
    "TIERS",
    "BatchConfig",
    "Budget",
    "DataConfig",
    "DecayShape",
    "Durability",
    "Endurance",
    "EngineConfig",
    "EvaluateConfig",
    "Family",
    "GradDtype",
    "LoraConfig",
    "LrScheduleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OptimizerName",
    "Override",
    "Precision",
    "RunConfig",
    "SourceConfig",
    "StepConfig",
    "StreamConfig",
    "Tier",
    "TokenizerConfig",
    "TokenizerTrainingConfig",
    "TrackerName",
    "TrainConfig",
    "ValidationConfig",
    "ZeroStage",
    "asked_vocabulary",
    "check_parts",
    "fields_of",
    "format_size",
    "parse_duration",
    "parse_size",
]
