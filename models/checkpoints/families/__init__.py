"""The families of published checkpoints, one file each, and the table from architecture names to families.

`family.py` describes a family of encoders and `decoder_family.py` a family of decoders. The encoders are `albert.py`, `bert.py`,
`bigbird.py`, `deberta.py`, `distilbert.py`, `electra.py`, `longformer.py`, `modernbert.py`, `mpnet.py`, `nomic.py`, `nystromformer.py`,
`reformer.py`, `roberta.py`. The decoders are `llama.py` (Llama, Mistral, Qwen2, Qwen3, Gemma; `rope.py` reads their rotary settings) and
`qwen3_5.py`.
"""

from typing import Literal

from models.checkpoints.families.albert import ALBERT
from models.checkpoints.families.bert import BERT
from models.checkpoints.families.bigbird import BIGBIRD
from models.checkpoints.families.deberta import DEBERTA
from models.checkpoints.families.decoder_family import DecoderFamily
from models.checkpoints.families.distilbert import DISTILBERT
from models.checkpoints.families.electra import ELECTRA
from models.checkpoints.families.family import Family
from models.checkpoints.families.llama import GEMMA, LLAMA, MISTRAL, QWEN2, QWEN3
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
    "Albert": ALBERT,
    "Electra": ELECTRA,
    "DebertaV2": DEBERTA,
    "ModernBert": MODERNBERT,
    "NomicBert": NOMIC,
    "Nystromformer": NYSTROMFORMER,
    "Longformer": LONGFORMER,
    "BigBird": BIGBIRD,
}

# End of an architecture's name -> kind of model to build. A language model is read without its head, if its folder names a pooling.
TASKS: dict[str, Literal["encoder", "classifier", "token_classifier"]] = {
    "Model": "encoder",
    "ForMaskedLM": "encoder",
    "ForPreTraining": "encoder",
    "ForSequenceClassification": "classifier",
    "ForTokenClassification": "token_classifier",
}

ARCHITECTURES = {family + task: (FAMILIES[family], TASKS[task]) for family in FAMILIES for task in TASKS}

# Architecture -> family. If the checkpoint also has a vision encoder, only the text decoder is read.
DECODERS: dict[str, DecoderFamily] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "GemmaForCausalLM": GEMMA,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
}
