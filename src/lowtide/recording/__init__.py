"""A step in events: storages that come and go, whose they are, and when. Simulated or traced, it reads alike."""

from __future__ import annotations

from lowtide.recording.events import Event, Moment, Owner

__all__ = ["Event", "Moment", "Owner"]
