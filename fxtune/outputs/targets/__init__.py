"""The targets of an export (vLLM, llama.cpp, Ollama) and the questions that prove it."""
