"""The clients, as Locust users: one class is one kind of client. `loadtest/locustfile.py` passes them to plain Locust, `planned.py` adds
the plan of `attnserve load`.

`asking.py` has the settings that all requests of a run share, `client.py` the base class, `embeddings.py`, `streams.py` and
`hostile.py` the kinds, `wire.py` and `crowd.py` idle and slow connections, `recorder.py` the samples. Only Locust's processes import this
package.
"""

from loadtest.users.embeddings import Documents, Embed, EmbedBatch, EmbedMixed, Rerank
from loadtest.users.hostile import Hostile
from loadtest.users.streams import Chat, Completion

USERS = (Embed, EmbedBatch, EmbedMixed, Documents, Rerank, Completion, Chat, Hostile)
