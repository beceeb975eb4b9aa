"""The disk in memory, as tests of the relay name it."""

from fedsender.simulation.relay_disk import MemoryDisk, MemoryFile, PowerCut

__all__ = ["MemoryDisk", "MemoryFile", "PowerCut"]
