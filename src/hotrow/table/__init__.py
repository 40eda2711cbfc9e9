"""A table over its tiers: its definition, its rows, and a batch's lookup through several tables."""

from hotrow.table.definition import Table
from hotrow.table.lookup import Lookup
from hotrow.table.policies import Admission, Expiry
from hotrow.table.rows import TableRows

__all__ = ["Admission", "Expiry", "Lookup", "Table", "TableRows"]
