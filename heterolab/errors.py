"""Every error a user can meet, in one place. Each message says what was wrong, in the
user's own values, and what to do next."""

from __future__ import annotations


class HeteroLabError(Exception):
    """Base of all errors that HeteroLab raises on purpose."""


class InputError(HeteroLabError, ValueError):
    """A value the user gave cannot be used; the message holds the value and the remedy."""


class DeviceUnavailable(HeteroLabError, RuntimeError):
    """The device asked for by name cannot be had here; nothing was put in its place."""


class OutOfDeviceMemory(HeteroLabError, MemoryError):
    """An allocation would not fit the device; nothing was allocated."""


class ProfileError(HeteroLabError):
    """A device profile is corrupt, or lacks a cost that the run needs."""


class TraceError(HeteroLabError):
    """A trace file is corrupt or of another version."""


class RaceError(HeteroLabError, RuntimeError):
    """Two operations touch the same bytes and nothing orders them."""


class StalledError(HeteroLabError, RuntimeError):
    """The host waits for something that can never happen."""


class NoisyMeasurement(HeteroLabError):
    """A machine's costs could not be measured: they came out differently each time."""
