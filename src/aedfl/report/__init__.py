"""Reports: they read records only."""

from .comparison import Row, comparison_table
from .write import write_report

__all__ = ["Row", "comparison_table", "write_report"]
