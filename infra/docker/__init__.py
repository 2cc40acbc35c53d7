"""The images of latentmill and what runs in them besides the services."""
