"""A plan's report as plain data."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.config import TIERS, Tier
from penstock.hardware.machine import Machine
from penstock.planner.durability import kill_seconds
from penstock.planner.forecast import Forecast
from penstock.planner.update_mode import steps_early

if TYPE_CHECKING:
    from penstock.planner.ask import PlanReport
    from penstock.planner.comparison import Comparison


def as_json(report: "PlanReport") -> dict[str, Any]:
    """Seconds, bytes, tokens, sequences; shares and factors as plain numbers."""
    f, task = report.forecast, report.forecast.task
    return {
        "model": {"name": task.shape.name, "parameters": f.parameters},
        "machine": task.machine.name,
        "profile": _profile(task.machine),
        "ranks": task.size,
        "copies": task.copies,
        "fits": f.beyond_machine is None,
        "step": {
            "seconds": f.step_seconds,
            "expected_seconds": f.choice.expected_seconds,
            "repeats": f.repeats,
            "tokens": f.tokens,
            "tokens_per_second": f.tokens_per_second,
            "mfu": f.mfu,
            "peak_flops": f.peak_flops,
            "model_flops": f.model_flops,
            "product_flops": f.product_flops,
            "of_product": f.of_product,
            "limit_seconds": f.limit_seconds,
            "bottleneck": f.bottleneck,
            "phases": {phase: {"lane": lane, "seconds": s} for phase, (lane, s) in f.phases.items()},
        },
        "plan": _plan(f),
        "lanes": {
            lane: {"bytes": x.nbytes, "work_seconds": x.work, "busy_seconds": x.busy} for lane, x in f.lanes.items()
        },
        "memory": {
            "budget": dict(task.given),
            **{phase: dict(sizes) for phase, sizes in f.memory.items()},
            "simulated_peak": dict(f.simulated_peak),
        },
        "disk": {
            "space": f.disk_bytes,
            "at_home": f.choice.plan.disk_bytes,
            "scratch": f.scratch_bytes,
            "snapshot": f.snapshot_bytes,
            "snapshots_kept": f.kept_snapshots,
            "export": f.export_bytes,
            "written_per_step": f.wear.written_bytes,
            "written_per_parameter": f.wear.per_parameter,
            "sustained_rates": all(drive.sustained is not None for drive in task.machine.drives),
            "tbw": f.wear.tbw,
            "days": f.wear.days,
            "steps": f.wear.steps,
            "written_per_day": f.written_per_day,
            "allowed_per_day": f.choice.question.allowance,
        },
        "durability": _durability(report),
        "run": None if (run := report.run) is None else {**asdict(run), "days": run.days},
        "batches": [
            {"sequences": p.batch, "tokens": p.tokens, "tokens_per_second": dict(p.tokens_per_second)}
            for p in report.curve
        ],
        "roofline": None if task.ranks > 1 else asdict(report.roofline),
        "advice": [asdict(one) for one in report.advice],
        "notes": list(report.notes),
        "search": {
            "estimate_seconds": f.choice.proposal.estimate,
            "considered": f.choice.considered,
            "simulated": f.choice.simulated,
        },
    }


def comparison_as_json(found: "Comparison") -> dict[str, Any]:
    """Seconds, bytes, tokens and sequences of each layout; those that fit are the fastest first."""
    asked = found.asked
    return {
        "model": asked.task.shape.name,
        "hosts": [
            {
                "name": kind.name,
                "machine": kind.machine.name,
                "count": kind.count,
                "ranks": asked.hosts.each,
                "nic": None if kind.machine.nic is None else asdict(kind.machine.nic),
            }
            for kind in asked.hosts.kinds
        ],
        "ranks": asked.hosts.ranks,
        "batch": asked.batch,
        "sequence_length": asked.task.sequence_length,
        "fastest": None if found.fastest is None else found.fastest.layout.name,
        "layouts": [
            {
                "name": one.layout.name,
                "settings": dict(one.settings),
                "seconds": one.seconds,
                "tokens": one.tokens,
                "tokens_per_second": one.tokens_per_second,
                "micro_batches": one.micro_batches,
                "micro_batch_size": one.micro_batch_size,
                "deal": list(one.deal) or None,
                "deal_by_compute_seconds": one.by_compute,
                "in_proportion_seconds": one.in_proportion,
                "hosts": [asdict(host) for host in one.hosts],
            }
            for one in found.outcomes
        ],
        "refused": [{"name": one.layout.name, "why": one.why} for one in found.refused],
    }


def _profile(machine: Machine) -> dict[str, Any]:
    measured = machine.measured
    return {
        "file": machine.file or None,
        "source": machine.source or None,
        "measured": None if measured is None else asdict(measured),
        "cores": machine.host.cores,
        "device": machine.device.name,
    }


def _durability(report: "PlanReport") -> dict[str, Any]:
    task, weighed = report.forecast.task, report.weighed
    return {
        "kept": task.budget.durability,
        "kill_seconds": kill_seconds(task, report.forecast.choice),
        "step_seconds": None if weighed is None else asdict(weighed),
    }


def _plan(f: Forecast) -> dict[str, Any]:
    settings, task = f.choice.plan.settings, f.task
    place = settings.place
    return {
        "schedule": f.choice.request.family,
        "micro_batches": f.micro_batches,
        "micro_batch_size": f.micro_batch_size,
        "sequence_length": task.sequence_length,
        "delay": settings.delay,
        "stage": settings.stage if task.ranks > 1 else None,
        "secondary": settings.secondary,
        "precision": task.precision,
        "grad_dtype": task.grad_dtype,
        "cast": settings.cast if task.grad_dtype != "fp32" else None,
        "optimizer": task.optimizer,
        "waits_for_norm": task.needs_norm,
        "speculates": steps_early(f.choice.plan.program, settings),
        "keeps_weights": settings.keep,
        "chunk": settings.chunk,
        "depths": asdict(settings.depths),
        "weights": shares(f, place.weights, frozen=True),
        "state": shares(f, place.state, frozen=False),
        "activations": place.activations,
        "graphs_kept": f.choice.plan.graphs_kept,
        "gradients": place.gradients if f.gradients_wait else None,
        "ops": len(f.choice.plan.schedule.ops),
    }


def shares(f: Forecast, tiers: tuple[Tier, ...], *, frozen: bool) -> dict[Tier, float]:
    """Share of the elements on each tier that has any; ``frozen``: count those that are not trained, too."""
    groups = f.choice.request.program.groups
    sizes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for group, tier in zip(groups, tiers, strict=True):
        sizes[tier] += group.numel if frozen else group.trainable
    total = max(sum(sizes.values()), 1)
    return {tier: n / total for tier, n in sizes.items() if n}
