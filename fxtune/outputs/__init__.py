"""Uses what a run has left on disk: finds it by name, merges it, chats with it, evaluates it, refreshes it."""
