"""Two ranks read one stream: what each made of it, and that both end where the second rank's breaks off."""

from __future__ import annotations

import json

from setting import this_device

from core import distributed
from core.errors import UserError
from tests.core.streams import DOCUMENTS, Broken, loader_of, seen

distributed.start(this_device(), 60)
found = seen(loader_of(DOCUMENTS, batch=2, accumulation=2).windows())
read, error = 0, ""
broken = Broken(DOCUMENTS, after=21) if distributed.rank() else DOCUMENTS
try:
    for _ in loader_of(broken, batch=2).windows():
        read += 1
except UserError as raised:
    error = str(raised)
distributed.stop()
print(json.dumps({"found": found, "read": read, "error": error}))
