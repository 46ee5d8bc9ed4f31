// Package archtest holds no code, only tests of the whole source tree: which
// package may import which, where cgo and gRPC may be, what no file may contain,
// and how long files and functions may be. Each rule states its reason where it
// is written down, and is itself tested on sources that break it.
package archtest
