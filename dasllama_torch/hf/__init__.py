"""What people who come from Hugging Face transformers expect: its calls, its folders, its tokenizers.

Nothing here imports transformers before it is needed; what needs it says so (`pip install dasllama-torch[hf]`).
"""
