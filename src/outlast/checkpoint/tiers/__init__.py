"""Where copies lie: folders, memory and object stores, and what is in them."""
