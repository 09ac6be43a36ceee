"""The fixtures of `tests/conftest_engine.py`, for every test here."""

from conftest_engine import start_engine, tiny_checkpoint

__all__ = ["start_engine", "tiny_checkpoint"]
