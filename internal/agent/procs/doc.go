// Package procs starts, signals and reaps the processes of the guest.
//
// A Table is the only place of the agent that forks and the only one that
// waits: os/exec beside a wait4(-1) loop would lose exit codes. Every process
// is the leader of its own process group, and signals go to the group.
package procs
