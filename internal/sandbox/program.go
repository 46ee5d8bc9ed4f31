package sandbox

import "strings"

// Program is code to run in a sandbox: the contract's run, without the VM.
type Program struct {
	// Lang picks interpreter and file name: see Interpreter.
	Lang string
	Code []byte
	// Args follow the code's path.
	Args []string
}

// Interpreter returns the program that runs code of lang and the path the code
// is written to (contract: run). Anything but the known names is itself the
// interpreter's program.
func Interpreter(lang string) (program, path string) {
	switch lang {
	case "node", "js", "javascript":
		return "node", "/tmp/run.js"
	case "python", "py":
		return "python3", "/tmp/run.py"
	case "shell", "sh", "bash":
		return "/bin/sh", "/tmp/run.sh"
	default:
		return lang, "/tmp/run.txt"
	}
}

// GuessLang finds a program's language from its file name's ending, else from
// the image's name; "" when neither tells.
func GuessLang(file, image string) string {
	for _, ending := range []struct{ suffix, lang string }{
		{".py", "python"}, {".js", "node"}, {".mjs", "node"}, {".cjs", "node"}, {".sh", "shell"},
	} {
		if strings.HasSuffix(file, ending.suffix) {
			return ending.lang
		}
	}
	// The last element of "docker.io/library/python:3.12" or of a layout's path.
	base := image[strings.LastIndexByte(image, '/')+1:]
	base, _, _ = strings.Cut(base, ":")
	base, _, _ = strings.Cut(base, "@")
	switch base {
	case "python", "node":
		return base
	case "busybox", "alpine", "debian", "ubuntu":
		return "shell"
	default:
		return ""
	}
}
