"""A plan in a line: its schedule, what lives where, and the peak of each tier."""

from collections import Counter

from penstock.config import format_size
from penstock.planner.plan import Plan


def in_words(plan: Plan) -> str:
    place = plan.settings.place
    homes = f"groups' weights {dict(Counter(place.weights))}, state {dict(Counter(place.state))}"
    peaks = f"peak device {format_size(plan.device_bytes)}, host {format_size(plan.host_bytes)}"
    return f"{plan.schedule!r}; {homes}, saved activations {place.activations}, gradients {place.gradients}; {peaks}"
