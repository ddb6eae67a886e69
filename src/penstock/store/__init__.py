"""The disk tier: packed, preallocated, striped files with direct I/O, a manifest, a lock and commit records.

layout.py     which bytes live where in one logical address space, and under which checksum (pure arithmetic)
checksums.py  the checksum of a block
digests.py    the checksums of all blocks
striping.py   the logical address space cut over one file per directory (pure arithmetic)
packed.py     one preallocated file, read and written directly; every way a transfer can fail
kernel.py     the kernel's asynchronous I/O, by the native library (``native/``)
transfer.py   requests spread over the files
directory.py  checks of the directories that the user gives, and their lock
manifest.py   what a store is made for, and which of its directories is which
records.py    small checksummed JSON documents: manifest and commit records
journal.py    text files that grow with a run: metrics and traces
successor.py  a store that takes the place of another, in the same directories
store.py      `Store`: what the executor reads and writes during training
facts.py      facts about a store, without opening it
removal.py    removes stores that nobody has open
whole.py      folders that appear whole or not at all
snapshot.py   `written_snapshot`, `SnapshotReader`: what `engine.save` and `engine.load` use
snapshot_place.py  the folder of a snapshot, until it is whole
snapshot_parts.py  what a snapshot is made of: one process's, or a part of each rank

Imports only config and errors from the rest of the package, and never torch: buffers are numpy arrays or memoryviews.
May import: ``errors``, ``files``, ``native``, ``documents``, ``config``.
"""

from penstock.store.layout import ALIGN, Extent, Grid, Layout, Region
from penstock.store.snapshot import SnapshotReader, written_snapshot
from penstock.store.store import Store, StoreStats
from penstock.store.transfer import aligned_bytes

__all__ = [
    "ALIGN",
    "Extent",
    "Grid",
    "Layout",
    "Region",
    "SnapshotReader",
    "Store",
    "StoreStats",
    "aligned_bytes",
    "written_snapshot",
]
