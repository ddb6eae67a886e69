"""Private names of Lightning Fabric: the steps of a strategy that it has no public names for."""

from typing import Any

from lightning_fabric.plugins.precision import Precision
from lightning_fabric.strategies.single_device import SingleDeviceStrategy

__all__ = ["OneDevice", "Precision"]


class OneDevice(SingleDeviceStrategy):
    """A strategy on one device that Fabric may give several to: then ``check_devices`` says no."""

    num_nodes = 1
    _num_nodes = 1
    """The number of hosts, which Fabric sets. Without: more than one host would be taken for one."""

    @property
    def host_count(self) -> int:
        return self._num_nodes

    def check_devices(self) -> None:
        """To be overridden. Raises: whatever is to be said about devices that cannot be used."""
        raise NotImplementedError

    def _configure_launcher(self) -> None:
        """Called once Fabric has set the devices, and before any process is started.

        Without: several devices would be found out about only where the model is set up.
        """
        self.check_devices()

    def plain(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with ``state_dict()`` of all that has one, as Fabric's own strategies save it.

        Without: schedulers and the like would be pickled whole.
        """
        return self._convert_stateful_objects_in_state(state, filter={})
