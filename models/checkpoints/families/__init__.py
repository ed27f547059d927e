"""One file a family of published checkpoints, and the table from the name of an architecture to its family.

`family.py` is their common description and `decoder_family.py` the same for decoders. `bert.py`, `bigbird.py`, `distilbert.py`,
`longformer.py`, `modernbert.py`, `mpnet.py`, `nomic.py`, `nystromformer.py`, `reformer.py`, `roberta.py`; `qwen3_5.py` is a decoder's.
"""

from typing import Literal

from models.checkpoints.families.bert import BERT
from models.checkpoints.families.bigbird import BIGBIRD
from models.checkpoints.families.decoder_family import DecoderFamily
from models.checkpoints.families.distilbert import DISTILBERT
from models.checkpoints.families.family import Family
from models.checkpoints.families.longformer import LONGFORMER
from models.checkpoints.families.modernbert import MODERNBERT
from models.checkpoints.families.mpnet import MPNET
from models.checkpoints.families.nomic import NOMIC
from models.checkpoints.families.nystromformer import NYSTROMFORMER
from models.checkpoints.families.qwen3_5 import QWEN3_5
from models.checkpoints.families.roberta import ROBERTA

FAMILIES: dict[str, Family] = {
    "Bert": BERT,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "DistilBert": DISTILBERT,
    "MPNet": MPNET,
    "ModernBert": MODERNBERT,
    "NomicBert": NOMIC,
    "Nystromformer": NYSTROMFORMER,
    "Longformer": LONGFORMER,
    "BigBird": BIGBIRD,
}

# A model saved with a language-modelling head is read as the encoder inside it.
TASKS: dict[str, Literal["encoder", "classifier", "token_classifier"]] = {
    "Model": "encoder",
    "ForMaskedLM": "encoder",
    "ForPreTraining": "encoder",
    "ForSequenceClassification": "classifier",
    "ForTokenClassification": "token_classifier",
}

ARCHITECTURES = {family + task: (FAMILIES[family], TASKS[task]) for family in FAMILIES for task in TASKS}

# A model saved with its vision part is read as the decoder of text inside it.
DECODERS: dict[str, DecoderFamily] = {"Qwen3_5ForCausalLM": QWEN3_5, "Qwen3_5ForConditionalGeneration": QWEN3_5}
