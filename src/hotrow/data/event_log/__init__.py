"""Histories that HotRow builds itself out of an event log, in event time.

    options.py      Histories: which column is the user, which events enter a history, which rows are examples
    event_store.py  the events of every user, with a memory budget: immutable sorted runs, merged as they grow
    builder.py      rows of a log in, examples with their histories out, and the state after any of them

`files/file_source.py` and `streams/follow.py` run a builder between their raw rows and the features. Imports `features`
and `batch`. A builder belongs to one pass and is used by one thread; the states that it hands out never change.
"""
