// Package fsops does the agent's work on files: stat, list, make, remove, chmod,
// move, read, write, grep and sed, with the results and errors of the sandbox
// contract.
//
// Every error that a caller of the contract may see is a *fault.Error; the others
// are the end of the given context and what an emit function returned. Paths are
// bytes; a relative one starts at "/". A walk holds a directory open and goes on
// from there by name without following links, so that a tree that is changed
// meanwhile cannot lead it elsewhere. A context ends an operation between two
// system calls; one that the kernel does not answer is the caller's to abandon.
//
// Files are replaced by a new one that takes the name in one step. While it is
// written it has no name where the file system can do that; else (an overlay of
// Linux 6.1), and while a tree is copied between file systems, it is named
// ".iii-tmp-*" next to its place and is removed on every failure; only the end of
// the VM itself can leave it.
//
// The package needs Linux and a mounted /proc.
package fsops
