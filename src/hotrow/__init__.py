"""HotRow."""
