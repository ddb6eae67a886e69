"""Ways in which ranks share a model, the same in the file and in a library's loop. ``wrap`` has them from its mesh."""

from dataclasses import dataclass

from penstock.config.checked import check_least
from penstock.config.step import check_copies
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Ways in which ranks share a model; with none of them, all share all state.

    | field | meaning |
    |---|---|
    | ``copies`` | copies of the state, each shared by as many neighbouring ranks (HSDP): with as many as there are
    hosts each host has one, and another's takes over where a host is lost. Changes no result |
    | ``pipeline`` | ranks of a pipeline: each has some of the blocks whole, with their state on its own drives, and
    activations alone cross between ranks, as suits a slow network. A multiple of as many are pipelines beside each
    other, whose neighbours share what is one rank's; 1: all ranks share all state. Changes no result |
    | ``cp`` | neighbouring ranks that share each sequence, and with it the memory of its activations (context
    parallel); they share the state, too |
    """

    copies: int = 1
    pipeline: int = 1
    cp: int = 1

    def sharing(self, ranks: int) -> int:
        """The number of ranks that share the micro-batches of a step, of so many that train: those of a pipeline, and
        those that share each sequence, count as one."""
        return ranks // self.pipeline // self.cp

    def check_layout(self) -> None:
        """Raises:
        ConfigError: one of them is no number of ranks, or two exclude each other.
        """
        check_least(self, copies=1, pipeline=1, cp=1)
        if self.pipeline > 1 and self.copies > 1:
            raise ConfigError(
                f"pipeline={self.pipeline} with copies={self.copies}: a pipeline has one copy of the state. Leave one "
                "out"
            )

    def check_started(self, processes: int) -> None:
        """``check_ranks``, of so many processes as have been started."""
        for key in ("copies", "pipeline", "cp") if processes == 1 else ():
            if (count := getattr(self, key)) > 1:
                raise ConfigError(
                    f"{key}={count} is of several processes, and this is one: start them with torchrun "
                    f"--nproc-per-node N, or leave {key} out"
                )
        self.check_ranks(processes)

    def check_ranks(self, ranks: int) -> None:
        """Raises:
        ConfigError: so many ranks cannot share a model so.
        """
        check_copies(self.copies, ranks)
        if ranks % self.pipeline:
            raise ConfigError(
                f"pipeline={self.pipeline}: {ranks} rank{'s' * (ranks > 1)} cannot be pipelines of as many each: start "
                f"a multiple of {self.pipeline}"
            )
        check_cp(self.cp, ranks // self.copies // self.pipeline)


def check_cp(cp: int, ranks: int) -> None:
    """``ranks``: that have the same copy of the state, or place in a pipeline.

    Raises:
        ConfigError: they cannot share sequences ``cp`` by ``cp``.
    """
    if ranks % cp:
        raise ConfigError(
            f"cp={cp}: {ranks} rank{'s' * (ranks > 1)} cannot share sequences {cp} by {cp}: let a multiple of {cp} "
            "have each copy of the state, or place in a pipeline"
        )
