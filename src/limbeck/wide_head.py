"""Classifiers whose head is wider than their states: a small body under the head of a larger model.

The head is the family's own, `output(activation(dense(state)))`, but `dense` leads from the width of the states to
`head_size`. This file needs transformers alone. It lies beside every model of these classes, and
`AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)` runs it.
"""

from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)


class WideHead(PreTrainedModel):
    """Mixed into a family's classifier: the same head, of the configuration's `head_size`."""

    maps = ("classifier.dense", "classifier.out_proj")  # where the head's two linear maps are

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        dense, output = self.maps
        bias = getattr(self.get_submodule(dense), "bias", None) is not None
        self.set_submodule(dense, nn.Linear(config.hidden_size, config.head_size, bias=bias))
        self.set_submodule(output, nn.Linear(config.head_size, int(config.num_labels or 0)))
        self.post_init()


class WideHeadBertConfig(BertConfig):
    """BERT's, and the width of the head."""

    model_type = "limbeck-bert"
    head_size: int = 768


class WideHeadBertForSequenceClassification(WideHead, BertForSequenceClassification):
    """A BERT under a wider pooler and classifier."""

    config_class = WideHeadBertConfig
    maps = ("bert.pooler.dense", "classifier")


class WideHeadRobertaConfig(RobertaConfig):
    """RoBERTa's, and the width of the head."""

    model_type = "limbeck-roberta"
    head_size: int = 768


class WideHeadRobertaForSequenceClassification(WideHead, RobertaForSequenceClassification):
    """A RoBERTa under a wider classifier."""

    config_class = WideHeadRobertaConfig


class WideHeadXLMRobertaConfig(XLMRobertaConfig):
    """XLM-RoBERTa's, and the width of the head."""

    model_type = "limbeck-xlm-roberta"
    head_size: int = 768


class WideHeadXLMRobertaForSequenceClassification(WideHead, XLMRobertaForSequenceClassification):
    """An XLM-RoBERTa under a wider classifier."""

    config_class = WideHeadXLMRobertaConfig


class WideHeadElectraConfig(ElectraConfig):
    """ELECTRA's, and the width of the head."""

    model_type = "limbeck-electra"
    head_size: int = 768


class WideHeadElectraForSequenceClassification(WideHead, ElectraForSequenceClassification):
    """An ELECTRA under a wider classifier."""

    config_class = WideHeadElectraConfig


class WideHeadDistilBertConfig(DistilBertConfig):
    """DistilBERT's, and the width of the head."""

    model_type = "limbeck-distilbert"
    head_size: int = 768


class WideHeadDistilBertForSequenceClassification(WideHead, DistilBertForSequenceClassification):
    """A DistilBERT under a wider classifier."""

    config_class = WideHeadDistilBertConfig
    maps = ("pre_classifier", "classifier")


class WideHeadMPNetConfig(MPNetConfig):
    """MPNet's, and the width of the head."""

    model_type = "limbeck-mpnet"
    head_size: int = 768


class WideHeadMPNetForSequenceClassification(WideHead, MPNetForSequenceClassification):
    """An MPNet under a wider classifier."""

    config_class = WideHeadMPNetConfig


class WideHeadDebertaV2Config(DebertaV2Config):
    """DeBERTa's, and the width of the head."""

    model_type = "limbeck-deberta-v2"
    head_size: int = 768


class WideHeadDebertaV2ForSequenceClassification(WideHead, DebertaV2ForSequenceClassification):
    """A DeBERTa under a wider pooler and classifier."""

    config_class = WideHeadDebertaV2Config
    maps = ("pooler.dense", "classifier")


class WideHeadAlbertConfig(AlbertConfig):
    """ALBERT's, and the width of the head."""

    model_type = "limbeck-albert"
    head_size: int = 768


class WideHeadAlbertForSequenceClassification(WideHead, AlbertForSequenceClassification):
    """An ALBERT under a wider pooler and classifier."""

    config_class = WideHeadAlbertConfig
    maps = ("albert.pooler", "classifier")


class WideHeadModernBertConfig(ModernBertConfig):
    """ModernBERT's, and the width of the head."""

    model_type = "limbeck-modernbert"
    head_size: int = 768


class WideHeadModernBertForSequenceClassification(WideHead, ModernBertForSequenceClassification):
    """A ModernBERT under a wider head, which has a norm between its maps."""

    config_class = WideHeadModernBertConfig
    maps = ("head.dense", "classifier")

    def __init__(self, config: WideHeadModernBertConfig) -> None:
        super().__init__(config)
        self.head.norm = nn.LayerNorm(config.head_size, eps=config.norm_eps, bias=config.norm_bias)


CLASSES = {
    WideHeadBertConfig: WideHeadBertForSequenceClassification,
    WideHeadRobertaConfig: WideHeadRobertaForSequenceClassification,
    WideHeadXLMRobertaConfig: WideHeadXLMRobertaForSequenceClassification,
    WideHeadElectraConfig: WideHeadElectraForSequenceClassification,
    WideHeadDistilBertConfig: WideHeadDistilBertForSequenceClassification,
    WideHeadMPNetConfig: WideHeadMPNetForSequenceClassification,
    WideHeadDebertaV2Config: WideHeadDebertaV2ForSequenceClassification,
    WideHeadAlbertConfig: WideHeadAlbertForSequenceClassification,
    WideHeadModernBertConfig: WideHeadModernBertForSequenceClassification,
}
for config, model in CLASSES.items():  # saved with this file beside them
    config.register_for_auto_class()
    model.register_for_auto_class("AutoModelForSequenceClassification")
