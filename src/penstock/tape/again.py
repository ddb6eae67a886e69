"""A probe's forward once more, from other values in places: see ``changes``."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.tape import trees
from penstock.tape.buffers import ModulesBefore
from penstock.tape.changes import BROKEN_OFF, Change, Overwritten, Trials
from penstock.tape.modes import TrainingFlags
from penstock.tape.places import Held, Holder, Memory, put
from penstock.tape.segments import BirthOf, Segment
from penstock.tape.suspended import SuspendedForward

if TYPE_CHECKING:
    from penstock.tape.tape import Tape


@dataclass(frozen=True, kw_only=True)
class Again:
    """Runs the forward of a probe that is done, of ``segments``; its modules begin as ``before``, and so do the
    tensors that are ``overwritten``. ``weights``: what loads a group's, has those loaded that a segment reads now and
    did not before, and unloads all."""

    tape: "Tape"
    micro_batch: Mapping[str, Any]
    train: bool
    segments: Sequence[Segment]
    before: ModulesBefore
    overwritten: Overwritten
    flags: TrainingFlags
    weights: tuple[Callable[[int], None], AbstractContextManager[Any], Callable[[], None]]

    def __call__(self, values: Held, at: Mapping[int, Held]) -> tuple[float | None, Mapping[Holder, Any]]:
        """As ``run`` of ``Trials``."""
        self.before.put_back()
        self.overwritten.put_back()
        put(values)
        suspended = SuspendedForward(
            model=self.tape.model,
            loss_fn=self.tape.loss_fn,
            micro_batch=trees.snapshot(self.micro_batch),  # a loss may change it
            index=0,
            train=self.train,
            device=self.tape.device,
            flags=self.flags,
        )
        self.tape.suspended.append(suspended)  # which ends it, whatever happens here
        met: dict[Holder, Any] = {}
        try:
            for index, segment in enumerate(self.segments):
                met |= {place: place.now() for place, _ in at.get(index, ())}
                put(at.get(index, ()))
                if not self._run(suspended, index, segment):
                    return None, met
        except Exception:  # noqa: BLE001  these values have brought it about: the probe's own run had none
            return BROKEN_OFF, met
        finally:
            _, _, release = self.weights
            release()
            suspended.close()
            self.tape.suspended.remove(suspended)
        loss, suspended.loss = suspended.loss, None
        return (None if loss is None else float(loss.detach())), met

    def _run(self, suspended: SuspendedForward, index: int, segment: Segment) -> bool:
        """Run a segment. False: there is another one, or none, where it was."""
        running, site = self.tape.running, segment.site
        if site is not None and (suspended.arrival is None or suspended.arrival.site is not site):
            return False
        bring, ahead, release = self.weights
        for group in sorted(segment.forward.reads):
            bring(group)
        with ahead:
            if site is None:
                event = running.run_code(suspended, index)
            else:
                event = running.run_call(suspended, index, segment.facts)
        suspended.backward.calls.pop(index, None)
        suspended.outputs.clear()
        release()
        return (event == "done") is (index == len(self.segments) - 1)


def settle(
    changes: Collection[Change],
    suspects: Collection[Change],
    again: Again,
    loss: float | None,
    birth_of: BirthOf,
    *,
    tries: bool,
) -> tuple[str, Iterable[int]] | None:
    """Note behind which segments there are values of a forward's ``changes`` that later ones may read, and around which
    calls these are to be what they were. Returns what goes on to the next micro-batch, in words, with the segments that
    change it, be it an attribute of the ``suspects``. ``loss``: as of ``Trials``. Without ``tries`` something else
    goes on that is known."""
    segments, last, trials = again.segments, len(again.segments) - 1, Trials([*changes, *suspects], again, loss)
    again.tape.moving |= {change.place for change in changes if not change.is_mark}
    if not tries:
        _note_found(segments, (c for c in changes if c.is_plain()))
        return None
    carried = trials.carried(lambda tensor: (birth := birth_of(tensor)) is None or birth.depends)
    several = [c for c in suspects if len(c.after) > 1 and not isinstance(c.place, Memory)]  # the others are known
    own = trials.own([c for c in (*filter(Change.is_plain, changes), *several) if c not in carried], last)
    for change in own:
        for segment in segments[change.first : change.first + 1] if change.is_of_one else segments[:last]:
            segment.assigned.add(change.place)
    again.tape.restored |= {c.place for c in own if c.begins_anew}
    again.tape.flowing |= {c.place for c in own if c.is_of_one}
    _note_found(segments, [*own, *(c for c in carried if c.is_plain())])
    for change in changes:
        for index in change.after:  # where a call goes on from what is there, its recomputation does from the same
            segments[index].facts.undoes += (change.place,)
            if change.is_plain() and change.place not in segments[index].facts.finds:
                segments[index].facts.finds += (change.place,)
    if not carried:
        return None
    what = carried[0].name
    return (what if carried[0] not in changes else f"what is in {what!r}"), carried[0].after


def _note_found(segments: Iterable[Segment], changes: Iterable[Change]) -> None:
    """Note that blocks which are computed again are to find in places what their calls have found."""
    found = tuple(change.place for change in changes)
    for segment in segments:
        segment.facts.finds += found
