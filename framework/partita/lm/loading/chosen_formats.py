"""What a machine chooses for the number formats of a configuration, without loading libraries for most files."""

from partita_schema.config import Config
from partita_schema.sections.quantization import DynamicInt8Quantization


def chosen_formats(config: Config) -> dict[str, str]:
    """Return what the machine chooses for keys of the file, by key."""
    chosen = {}
    if config.model_parameters.dtype == "fastest":
        from partita.lm.devices import asked_device
        from partita.lm.loading.number_formats import faster_dtype

        chosen["model_parameters.dtype"] = faster_dtype(asked_device(config.model_parameters)).text
    if isinstance(config.quantization, DynamicInt8Quantization):
        chosen["quantization.type"] = (
            "measured when the model is loaded; layers that are not faster in int8 keep the dtype of the model"
        )
    return chosen
