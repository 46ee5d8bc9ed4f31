package main

// recipe says how one image is made.
type recipe struct {
	name string
	// packages are asked for; what they depend on comes with them.
	packages []string
	// drop are packages that others depend on for their maintainer scripts
	// alone. No script is run here, so they would be dead weight.
	drop []string
	// finish does what the maintainer scripts would have done.
	finish []step
	env    []string
	cmd    []string
}

// recipes are all images, in the order in which "all" builds them.
func recipes() []recipe {
	return []recipe{
		{
			name: "python",
			// pip comes without its recommended compiler (2.3 MB instead of
			// 80); wheels need none.
			packages: append(basePackages(), "python3", "python3-pip", "python3-venv", "tzdata"),
			drop:     scriptPackages(),
			finish:   []step{mergedUsr, accounts, baseDirs, baseFiles, certificates, alternatives, python, loaderCache},
			env:      baseEnv(),
			cmd:      []string{"python3"},
		},
		{
			name: "node",
			// npm is left out: Debian splits it into 370 packages.
			packages: append(basePackages(), "nodejs", "tzdata"),
			drop:     scriptPackages(),
			finish:   []step{mergedUsr, accounts, baseDirs, baseFiles, certificates, alternatives, loaderCache},
			env:      baseEnv(),
			cmd:      []string{"node"},
		},
		{
			// For tests of the network. What of git is written in Perl is not
			// needed to clone.
			name:     "git",
			packages: append(basePackages(), "git"),
			drop:     append(scriptPackages(), "git-man", "liberror-perl", "perl"),
			finish:   []step{mergedUsr, accounts, baseDirs, baseFiles, certificates, alternatives, loaderCache},
			env:      baseEnv(),
			cmd:      []string{"sh"},
		},
		{
			name:     "busybox",
			packages: []string{"busybox-static"},
			finish:   []step{mergedUsr, busybox},
			env:      []string{pathEnv},
			cmd:      []string{"sh"},
		},
	}
}

// basePackages are the shell and tools that scripts take for granted.
func basePackages() []string {
	return []string{
		"base-files", "base-passwd", "bash", "ca-certificates", "coreutils", "dash", "debianutils", "diffutils",
		"findutils", "grep", "gzip", "hostname", "libc-bin", "mawk", "netbase", "procps", "sed", "tar",
		// Chosen before usrmerge, which would bring all of Perl.
		"usr-is-merged",
	}
}

func scriptPackages() []string {
	return []string{"debconf", "dpkg", "init-system-helpers", "perl-base", "usr-is-merged"}
}

const pathEnv = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func baseEnv() []string { return []string{pathEnv, "LANG=C.UTF-8"} }
