"""Prompts and verifiable rewards."""

from rz.tasks.arithmetic import Arithmetic, CharTokenizer
from rz.tasks.interface import Task
from rz.tasks.jsonl import jsonl_task
from rz.tasks.open import open_task
from rz.tasks.reasoning import reasoning_gym_task
from rz.tasks.text import TextTask

__all__ = ["Arithmetic", "CharTokenizer", "Task", "TextTask", "jsonl_task", "open_task", "reasoning_gym_task"]
