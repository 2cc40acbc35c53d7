"""The engines that turn job parameters into frames, and the child process they run in."""
