package kube_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

const (
	imageBytes = 60 << 20 // of the program, which is nearly all of the image
	imageUser  = 10001
)

// TestTheProgramOfTheImageNeedsNothingElse builds it as the Dockerfile says, and runs it with simulated
// engines in a root folder that has nothing but /tmp, /proc and /dev, as the user of the image.
func TestTheProgramOfTheImageNeedsNothingElse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may change the root folder")
	}
	text, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	build := regexp.MustCompile(`(?m)^RUN (CGO_ENABLED=0 go build .*)$`).FindStringSubmatch(string(text))
	if build == nil {
		t.Fatal("the Dockerfile builds in another way")
	}
	root := t.TempDir()
	if err := os.Chmod(filepath.Dir(root), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", strings.ReplaceAll(build[1], "/image", root))
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if is, err := os.Stat(root + "/dpserve"); err != nil || is.Size() > imageBytes {
		t.Fatal("the program is missing or too large", err)
	}
	if err := os.Mkdir(root+"/tmp", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(root+"/tmp", imageUser, imageUser); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/proc", "/dev"} { // as every container has them
		if err := os.Mkdir(root+name, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount(name, root+name, "", syscall.MS_BIND, ""); err != nil {
			t.Skip(name, " cannot be mounted: ", err)
		}
		defer func() { _ = syscall.Unmount(root+name, 0) }()
	}
	run := exec.Command("/dpserve", "up", "--port", "0", "-o", "json")
	run.Env, run.Dir, run.Stderr = []string{"HOME=/tmp"}, "/", os.Stderr
	run.SysProcAttr = &syscall.SysProcAttr{
		Chroot: root, Credential: &syscall.Credential{Uid: imageUser, Gid: imageUser},
	}
	out, err := run.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = run.Process.Kill() }()
	var at struct{ URL string }
	if line, err := bufio.NewReader(out).ReadBytes('\n'); err != nil || json.Unmarshal(line, &at) != nil {
		t.Fatalf("%v: %s", err, line)
	}
	resp, err := http.Get(at.URL + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Error("it is not ready:", resp.Status)
	}
	_ = run.Process.Signal(syscall.SIGTERM)
	if err := run.Wait(); err != nil {
		t.Error("it does not end as it should:", err)
	}
}
