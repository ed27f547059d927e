"""What the routes for text share: completions, chat, responses, images, text-generation-inference and states.

A body goes through these files in reading order: `schemas.py` (its fields), `grammars.py` (the constraint on its text), `request.py` (its
model, its prompts and the requests to the engine), `answer.py` (ids, warnings and bounds on the answer's size), `logprobs.py` and
`chunks.py` (the parts of an answer as JSON), `pipeline.py` (all steps of completions and chat, and their streams that clients can
continue)."""
