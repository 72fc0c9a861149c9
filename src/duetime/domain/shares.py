"""How namespaces share what an instance has only so much of, without a list of namespaces.

Of what is still free, one namespace may use `SHARE` times as much. With 4, a namespace alone gets 4/5 of all, two of
them get 4/9 each, and so on: there is always something free for another one.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SHARE"]

SHARE: Final = 4
