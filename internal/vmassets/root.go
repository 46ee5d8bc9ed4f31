package vmassets

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// rootDirs are what libkrun's init and the agent mount on. They are made here
// because the guest may not be able to.
func rootDirs() []string {
	return []string{"dev", "proc", "sys", "tmp", ".iii", ".iii/lower", ".iii/disk", ".iii/root"}
}

// MakeRoot makes the directory that a guest of libkrun boots from: the agent and
// empty directories. It is a copy for one VM, because the guest can write to it:
// with a shared file one guest could give another a different agent, and a hard
// link is a shared file. The copy is made by the kernel, without taking space
// where the file system can share blocks. An existing dir is an error
// (fs.ErrExist); a call that fails or is killed leaves a part behind, to go with
// the machine directory around it.
func MakeRoot(dir, agent string) error {
	if err := CheckAgent(agent, runtime.GOARCH); err != nil {
		return err
	}
	if err := makeRoot(dir, agent); err != nil {
		return fmt.Errorf("make the directory that the guest boots from: %w", explainSpace(err))
	}
	return nil
}

func makeRoot(dir, agent string) (err error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for _, name := range rootDirs() {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			return err
		}
	}
	from, err := os.Open(agent)
	if err != nil {
		return err
	}
	defer from.Close()                                                                            //nolint:errcheck // only read
	to, err := os.OpenFile(filepath.Join(dir, "agent"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o700) //nolint:gosec // a program, for this user alone
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	_, err = io.Copy(to, from) // copy_file_range where there is one
	return err
}
