"""A table over its tiers: its definition, its rows, and a batch's lookup through several tables."""

from hotrow.row_policies import Admission, Expiry
from hotrow.table.lookup import Lookup
from hotrow.table.rows import TableRows
from hotrow.table_definition import Table

__all__ = ["Admission", "Expiry", "Lookup", "Table", "TableRows"]
