# Dependencies, installation, packages.
