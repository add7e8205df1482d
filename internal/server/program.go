package server

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/shim"
	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of the check of a program.
const (
	programTimeout = 5 * time.Second
	programOutput  = 64 << 10    // bytes of each stream
	programWait    = time.Second // for a stream that a child of the program holds open
)

// Reads says what a dpserve understands: `dpserve version --check DATA-DIR`.
type Reads struct {
	ShimOldest int    `json:"shim_oldest"` // versions of the protocol of shims
	ShimNewest int    `json:"shim_newest"`
	StateLevel int    `json:"state_level"`
	DataDir    string `json:"data_dir"`
	OK         bool   `json:"reads"`            // the data dir
	Reason     string `json:"reason,omitempty"` // why not
}

// CheckDataDir says what this program understands, and whether it reads a data dir. It changes and locks
// nothing there.
func CheckDataDir(dir string) Reads {
	r := Reads{
		ShimOldest: shim.Oldest, ShimNewest: shim.Version, StateLevel: state.Level, DataDir: dir,
	}
	err := cluster.CheckDataDir(dir)
	if err == nil {
		err = shim.CheckSpecs(filepath.Join(dir, node.EnginesDir))
	}
	if err != nil {
		r.Reason = err.Error()
	}
	r.OK = err == nil
	return r
}

// programAnswer is the part of `dpserve version --check -o json` that a restart asks for.
type programAnswer struct {
	Version  string `json:"version"`
	Platform string `json:"platform"`
	Check    *Reads `json:"check"`
}

// judge says why a program cannot replace one that speaks a version of the protocol of shims and whose log
// has a level; nil: it can.
func (a *programAnswer) judge(shimVersion, level int) error {
	here := runtime.GOOS + "/" + runtime.GOARCH
	switch c := a.Check; {
	case a.Version == "" || c == nil:
		return errors.New("it does not answer as a dpserve that can be checked")
	case a.Platform != here:
		return fmt.Errorf("it is built for %s, and this machine is %s", a.Platform, here)
	case c.ShimNewest < shimVersion:
		return fmt.Errorf("dpserve %s speaks version %d of the protocol of shims, the engines here were "+
			"started with version %d", a.Version, c.ShimNewest, shimVersion)
	case c.StateLevel < level:
		return fmt.Errorf("dpserve %s reads the state up to level %d, the log here has level %d", a.Version,
			c.StateLevel, level)
	case !c.OK:
		return fmt.Errorf("dpserve %s does not read the data dir: %s", a.Version, c.Reason)
	}
	return nil
}

// checkProgram runs the program that a restart would execute, and refuses one that does not answer or cannot
// go on here. It returns that program's version.
func checkProgram(n *Node) (version string, err error) {
	path := n.cfg.Program
	if path == "" {
		path, err = os.Executable()
	}
	var a programAnswer
	if err == nil {
		a, err = askProgram(n.life.ctx, path, n.cfg.DataDir, programTimeout)
	}
	if err == nil {
		err = a.judge(shim.Version, n.store.State().Level)
	}
	if err != nil {
		return "", problem.New(problem.Conflict,
			"this node cannot be restarted: %s: %w; the node goes on with the binary that it has", path, err).
			WithHint("put a dpserve for this machine there, not older than the running one, and try again")
	}
	return a.Version, nil
}

// askProgram runs `PATH version --check DATA-DIR -o json`.
func askProgram(ctx context.Context, path, dataDir string, limit time.Duration) (a programAnswer, err error) {
	if err := checkFile(path); err != nil {
		return a, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "version", "--check", dataDir, "-o", "json")
	out, said := &bounded{limit: programOutput}, &bounded{limit: programOutput}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, said, programWait
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err = cmd.Run()
	switch {
	case ctx.Err() != nil:
		return a, fmt.Errorf("it does not answer within %s", limit)
	case errors.Is(err, syscall.ENOEXEC):
		return a, fmt.Errorf("it is not for this machine (%s/%s), or not whole: %w", runtime.GOOS,
			runtime.GOARCH, syscall.ENOEXEC)
	}
	// a program that does not read the data dir ends with an error, after its answer
	if json.Unmarshal(out.Bytes(), &a) == nil {
		return a, nil
	}
	why := lastLine(said.String())
	if err == nil {
		return a, errors.New(cmp.Or(why, "it does not answer as a dpserve"))
	}
	if why != "" {
		return a, fmt.Errorf("it does not answer: %w: %s", err, why)
	}
	return a, fmt.Errorf("it does not answer: %w", err)
}

// checkFile refuses what is no binary before it is executed.
func checkFile(path string) error {
	if _, err := exec.LookPath(path); err != nil {
		if e, ok := errors.AsType[*exec.Error](err); ok {
			return e.Err // without the path again
		}
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var head [2]byte
	if n, _ := f.Read(head[:]); string(head[:n]) == "#!" {
		return errors.New("it is a script")
	}
	return nil
}

// bounded keeps the first bytes of a stream and drops the rest.
type bounded struct {
	bytes.Buffer
	limit int
}

// Write implements io.Writer. It never fails.
func (b *bounded) Write(p []byte) (int, error) {
	_, _ = b.Buffer.Write(p[:min(len(p), b.limit-b.Len())])
	return len(p), nil
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}
