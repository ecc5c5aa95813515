"""Sessions and the runner that turns them into Steps."""
