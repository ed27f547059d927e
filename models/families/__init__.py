"""One file a family of published checkpoints, and the table from an architecture's name to how it is read."""

from models.families.bert import BERT
from models.families.bigbird import BIGBIRD
from models.families.decoder_family import DecoderFamily
from models.families.distilbert import DISTILBERT
from models.families.family import Family
from models.families.longformer import LONGFORMER
from models.families.modernbert import MODERNBERT
from models.families.mpnet import MPNET
from models.families.nomic import NOMIC
from models.families.nystromformer import NYSTROMFORMER
from models.families.qwen3_5 import QWEN3_5
from models.families.roberta import ROBERTA

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
TASKS = {
    "Model": "encoder",
    "ForMaskedLM": "encoder",
    "ForPreTraining": "encoder",
    "ForSequenceClassification": "classifier",
    "ForTokenClassification": "token_classifier",
}

ARCHITECTURES = {family + task: (FAMILIES[family], TASKS[task]) for family in FAMILIES for task in TASKS}

# A model saved with its vision part is read as the decoder of text inside it.
DECODERS: dict[str, DecoderFamily] = {"Qwen3_5ForCausalLM": QWEN3_5, "Qwen3_5ForConditionalGeneration": QWEN3_5}
