"""Request fields that several APIs share, each with its bounds and one clear sentence when they are broken."""
