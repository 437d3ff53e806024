int command_info(int argc, char **argv); int command_info(int argc, char **argv){(void)argc;(void)argv;return 0;}
