package shimdriver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const (
	envShim  = "III_KRUN_SHIM"
	shimName = "krun-shim"
)

// FindShim returns the absolute path of krun-shim: III_KRUN_SHIM alone where
// set, else beside the running program, else in the cache. Never in PATH: a
// shim of another build would be found there.
func (d *Driver) FindShim() (string, error) {
	if named := d.cfg.Getenv(envShim); named != "" {
		path, err := filepath.Abs(named)
		if err == nil {
			err = checkExecutable(path)
		}
		if err != nil {
			return "", fmt.Errorf("%s=%s: %w", envShim, named, err)
		}
		return path, nil
	}
	var candidates []string
	if self, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		candidates = append(candidates, filepath.Join(filepath.Dir(self), shimName))
	}
	candidates = append(candidates, filepath.Join(d.cfg.Roots.VMM(), shimName))
	var tried []string
	for _, path := range candidates {
		err := checkExecutable(path)
		if err == nil {
			return path, nil
		}
		tried = append(tried, err.Error())
	}
	return "", fmt.Errorf("no %s (%s): build it with `make build`, or set %s to it", shimName, strings.Join(tried, "; "), envShim)
}

func checkExecutable(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return errors.New(path + " is not an executable file")
	}
	return nil
}
