"""Several drives of a disk tier together, which are striped."""

from collections.abc import Sequence

from penstock.hardware.machine import Drive


def used_rates(drives: Sequence[Drive]) -> str:
    """Which rates of writing plans for state on disk take, in a line."""
    known = [drive for drive in drives if drive.sustained is not None]
    if len(known) == len(drives):
        return "plans write at the sustained rate"
    if known:
        paths = ", ".join(drive.path for drive in drives if drive.sustained is None)
        return f"plans write at the sustained rate, but for {paths}, where it is not known"
    return "plans write at the rate of the first seconds: doctor --sustained measures what is left of it"
