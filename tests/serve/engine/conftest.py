"""Fixtures of engines.py, for all tests here."""

from engines import start_engine, start_process

__all__ = ["start_engine", "start_process"]
