"""An OpenAI-compatible server for one streamed model.

Requests are checked before the engine sees them, and whatever fails fails for one client. See `serve`.
"""

from __future__ import annotations
