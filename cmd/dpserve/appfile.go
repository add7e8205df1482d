package main

import (
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/wiring"
)

// maxFile is the largest app.yaml that is read, in bytes; the admin API takes no larger one.
const maxFile = 1 << 20

// appFile is an app.yaml that was read and found sound.
type appFile struct {
	name string // for messages
	text []byte
	apps []*app.Application
}

// readApps reads and checks a file ("-" is stdin). Warnings go to stderr; faults come back as app.Faults.
func (e *env) readApps(path string) (*appFile, error) {
	text, err := e.readFile(path)
	if err != nil {
		return nil, err
	}
	return e.parseApps(path, text)
}

func (e *env) parseApps(name string, text []byte) (*appFile, error) {
	file, warnings, err := wiring.ParseApps(name, text)
	for _, w := range warnings {
		talk(e.io.Err, "warning: %s", w.String())
	}
	if err != nil {
		return nil, err
	}
	return &appFile{name: name, text: text, apps: file.Applications}, nil
}

func (e *env) readFile(path string) ([]byte, error) {
	if path == "-" {
		return readBounded("stdin", e.io.In)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fileError(path, err)
	}
	defer func() { _ = f.Close() }() // only read
	return readBounded(path, f)
}

func readBounded(name string, r io.Reader) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, fileError(name, err)
	}
	if len(text) > maxFile {
		return nil, problem.New(problem.TooLarge, "%s is larger than 1 MiB", name).WithHint("is it an app.yaml?")
	}
	return text, nil
}

func fileError(path string, err error) error {
	cause := err
	var perr *fs.PathError
	if errors.As(err, &perr) {
		cause = perr.Err
	}
	return problem.New(problem.InvalidArgument, "cannot read %s: %w", path, cause).
		WithHint("`dpserve up` without a file runs a ready-made example")
}

// names lists the applications of a file, in its order.
func (f *appFile) names() []string {
	out := make([]string, len(f.apps))
	for i, a := range f.apps {
		out[i] = a.Name
	}
	return out
}
