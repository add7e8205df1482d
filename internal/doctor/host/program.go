package host

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/process"
)

// versionWait bounds a program that is asked for its version: vLLM imports all of torch before it answers.
const versionWait = 30 * time.Second

// environment is what os.Environ returns.
type environment []string

func (e environment) get(name string) string {
	for _, entry := range slices.Backward(e) {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return value
		}
	}
	return ""
}

// engines looks for the program of each application that starts one.
func engines(ctx context.Context, apps []*app.Application, env environment) []doctor.Engine {
	var out []doctor.Engine
	for _, a := range apps {
		if command := engine.Command(a); len(command) > 0 {
			out = append(out, findEngine(ctx, a, command, env))
		}
	}
	return out
}

func findEngine(ctx context.Context, a *app.Application, command []string, env environment) doctor.Engine {
	out := doctor.Engine{App: a.PoolName(), Kind: string(a.Engine.Kind), Program: command[0]}
	path, err := process.FindProgram(command[0], cmp.Or(a.Engine.Env["PATH"], env.get("PATH")))
	if err != nil {
		out.Error = plain(err)
		return out
	}
	out.Path = path
	if a.Engine.Kind != app.KindVLLM && a.Engine.Kind != app.KindSGLang {
		return out
	}
	if out.Version = installedVersion(path, string(a.Engine.Kind)); out.Version != "" {
		return out
	}
	if filepath.Base(path) != string(a.Engine.Kind) {
		out.Unknown = "no package " + string(a.Engine.Kind) + " is installed next to it"
		return out
	}
	out.Version, out.Unknown = askVersion(ctx, path, env, a.Engine.Env)
	return out
}

// installedVersion reads the version of an engine from the metadata of its Python package: in the
// installation that the program is part of, or that its first line names. "" = there is none.
func installedVersion(program, kind string) string {
	for _, root := range installations(program) {
		for _, packages := range []string{"site-packages", "dist-packages"} {
			pattern := filepath.Join(root, "lib*", "python3*", packages, kind+"-*.dist-info")
			found, err := filepath.Glob(pattern)
			if err != nil || len(found) == 0 {
				continue
			}
			slices.Sort(found) // the name of an older package may have been left behind
			name := strings.TrimSuffix(filepath.Base(found[len(found)-1]), ".dist-info")
			return strings.TrimPrefix(name, kind+"-")
		}
	}
	return ""
}

// installations lists the folders above bin/ of a program and of its interpreter, as written and with links
// followed: a virtual environment links to the Python that it is made from.
func installations(program string) []string {
	paths := []string{program}
	if interpreter := interpreterOf(program); interpreter != "" {
		paths = append(paths, interpreter)
	}
	var out []string
	for _, path := range paths {
		for _, at := range []string{path, followed(path)} {
			if root := filepath.Dir(filepath.Dir(at)); at != "" && !slices.Contains(out, root) {
				out = append(out, root)
			}
		}
	}
	return out
}

func followed(path string) string {
	at, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	return at
}

// interpreterOf returns the program that the first line of a script names; "" = it is no script.
func interpreterOf(script string) string {
	f, err := os.Open(script) //nolint:gosec // the engine's program
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }() // only read
	head := make([]byte, 512)
	n, _ := f.Read(head) // a short read tells enough
	line, _, _ := strings.Cut(string(head[:n]), "\n")
	words := strings.Fields(strings.TrimPrefix(line, "#!"))
	if !strings.HasPrefix(line, "#!") || len(words) == 0 || !filepath.IsAbs(words[0]) {
		return ""
	}
	return words[0]
}

var versionText = regexp.MustCompile(`\d+\.\d+[0-9A-Za-z.+]*`)

// askVersion runs the program with --version.
func askVersion(ctx context.Context, path string, env environment, own map[string]string) (version,
	why string,
) {
	ctx, cancel := context.WithTimeout(ctx, versionWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env = slices.Clone(env)
	for name, value := range own {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.WaitDelay = time.Second
	text, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return "", fmt.Sprintf("--version did not answer within %s", versionWait)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n") // warnings come before it
	last := lines[len(lines)-1]
	if err != nil {
		return "", fmt.Sprintf("--version ended with %s: %.200s", err, last)
	}
	if version = versionText.FindString(last); version == "" {
		return "", fmt.Sprintf("--version said %.200q", last)
	}
	return version, ""
}
