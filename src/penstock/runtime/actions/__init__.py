"""The actions of each kind of op: the only place where bytes of a step are moved or changed.

One class for each thing that is acted on, with a table of the kinds of ops that it does. They find buffers by the names
that ops have, and everything else (arrays, the tape, scratch space) by group and chunk, or stage and micro-batch. They
decide nothing: order, place and sizes are the schedule's.
"""

from collections.abc import Callable, Mapping, Sequence

from penstock.ranks.group import Ranks
from penstock.runtime.access import Access
from penstock.runtime.actions.between import Between
from penstock.runtime.actions.compute import Compute
from penstock.runtime.actions.crossing import Crossing
from penstock.runtime.actions.gradients import Gradients
from penstock.runtime.actions.matrices import MatrixUpdates
from penstock.runtime.actions.norm import Norm
from penstock.runtime.actions.optimizer import OptimizerSteps
from penstock.runtime.actions.saved_activations import SavedActivations
from penstock.runtime.actions.weights import Weights
from penstock.runtime.bound import Bound, refuse_others
from penstock.runtime.pools import Pools
from penstock.runtime.staging import Staging
from penstock.runtime.stepping import Stepping
from penstock.runtime.streams import Streams
from penstock.schedule.ir.ops import Op
from penstock.state.arrays import StateArrays
from penstock.store.store import Store
from penstock.tape.groups import ParamGroup
from penstock.tape.tape import Tape

Act = Callable[[Op], None]


class Actions:
    """The actions of one schedule.

    | attribute | meaning |
    |---|---|
    | ``access`` | to buffers and arrays, and ``access.context``, which is set anew for each step |
    | ``norm`` | what is known of the norm of the gradients |
    | ``kinds`` | kind of op -> what it does: what can be run |
    """

    def __init__(
        self,
        bound: Bound,
        pools: Pools,
        groups: Sequence[ParamGroup],
        arrays: StateArrays,
        tape: Tape,
        scratch: Store | None,
        streams: Streams,
        stepping: Stepping,
        ranks: Ranks,
        staging: Staging | None,
    ) -> None:
        """``staging``: where messages of a pipeline pass through host memory; None: they are there.

        Raises:
            ScheduleError: the schedule has ops that no action here is for.
        """
        self.access = Access(bound, pools, arrays, scratch)
        self.norm = Norm(self.access, stepping)
        self._compute = Compute(self.access, groups, tape)
        self._optimizer = OptimizerSteps(self.access, self.norm, stepping)
        self._crossing = Crossing(self.access, tape, ranks.pipe, streams, staging)
        self.kinds: dict[str, Act] = {}
        tables: tuple[Mapping[str, Act], ...] = (
            self._compute.kinds(),
            Weights(self.access).kinds(),
            Gradients(self.access, stepping).kinds(),
            self.norm.kinds(),
            self._optimizer.kinds(),
            MatrixUpdates(self.access, self.norm, stepping).kinds(),
            SavedActivations(self.access, tape, streams).kinds(),
            Between(self.access, self._compute, self.norm, ranks).kinds(),
            self._crossing.kinds(),
        )
        for table in tables:
            assert self.kinds.keys().isdisjoint(table)
            self.kinds |= table
        refuse_others(bound.schedule, self.kinds)
        assert ranks.size > 1 or not bound.schedule.lanes.get("net"), "who is alone has nobody to meet"

    def __call__(self, op: Op) -> int:
        """Do what an op says; the bytes that it has moved, counted where they are. Arithmetic moves what is planned."""
        self.access.moved = 0
        self.kinds[op.id.kind](op)
        if op.gives:
            self._crossing.given(op)
        return op.nbytes if op.lane == "cpu" else self.access.moved

    def begin(self) -> int:
        """Before the first op of a step: make what the step before has handed on what counts, where that has handed on
        nothing that does (``Bound.reads_ahead``). Returns the bytes that are read for that."""
        self.access.moved = 0
        self._compute.begin()
        if self.access.context.left is None:
            self._optimizer.read_anew()
        return self.access.moved

    def let_go(self) -> None:
        """After a step, when nothing of it is under way: parameters have no weights until the next one, and the memory
        of what has come from other ranks is given back."""
        self._compute.release()
        self._crossing.let_go()

    def release(self) -> None:
        """Detach all parameters; what a step that was broken off has left behind goes with it."""
        self._compute.release()
        self.norm.forget()
