"""CAR heads and DCPO on language models of `transformers`: CosyVoice 2, LLaSA, or any Llama- or
Qwen-like model.

dcar convert-backbone kind=cosyvoice2 source=pretrained_models/CosyVoice2-0.5B out=runs/cosyvoice2
dcar prepare mode=retokenize data=runs/prepared decoder=runs/cosyvoice2 out=runs/prepared_cosyvoice2
dcar train backbone.path=runs/cosyvoice2 backbone.train=lora data=runs/prepared_cosyvoice2
out=runs/car_lora
"""
