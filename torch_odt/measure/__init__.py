"""What training costs on this device: time, memory, energy, utilisation and heat."""

from __future__ import annotations

from torch_odt.measure.meter import Absent, Meter, Quantity
from torch_odt.measure.window import Window, find_meters

__all__ = ["Absent", "Meter", "Quantity", "Window", "find_meters"]
