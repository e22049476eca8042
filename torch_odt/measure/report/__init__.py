"""What a record of measurements says: in a terminal, as a page, against another record, and for other tools."""

from __future__ import annotations

from torch_odt.measure.report.comparison import Comparison, compare
from torch_odt.measure.report.page import page, write_page
from torch_odt.measure.report.terminal import table
from torch_odt.measure.report.trace import write_chrome_trace

__all__ = ["Comparison", "compare", "page", "table", "write_chrome_trace", "write_page"]
