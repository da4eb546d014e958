"""Short messages between the parent and a rank: JSON objects, each sent and received whole."""

import json
import socket
from typing import Any

__all__ = ["LONGEST_TEXT", "Channel", "Message", "channel_pair"]

Message = dict[str, Any]

# A system's buffer of a socket holds 200 kB or so; this leaves room for six bytes a letter.
LONGEST_TEXT = 16_000
LONGEST = 1 << 18


class Channel:
    """One end of a connection. What holds both ends open is the two processes, and nothing else.

    Args:
        end: of a pair of sockets that keep messages apart (`SOCK_SEQPACKET`).
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the descriptor, for `select` and for a child."""
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        self._end.send(json.dumps(message).encode())

    def receive(self) -> Message | None:
        """Wait for a message and return it; None if the other end is closed.

        Raises:
            ValueError: it is no JSON object.
        """
        try:
            data = self._end.recv(LONGEST)
        except ConnectionResetError:  # closed with messages unread
            return None
        if not data:
            return None
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError(f"{data[:40]!r} is no object")
        return message

    def close(self) -> None:
        """Close this end."""
        self._end.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Return both ends of a new connection."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ends[0]), Channel(ends[1])
