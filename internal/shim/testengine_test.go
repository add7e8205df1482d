package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/process"
)

// The test binary is also the shim, the engines, and what forges a shim: TestMain hands over when its first
// argument says so.
const (
	engineWord = "test-engine"
	ownerWord  = "test-owner"
	forgerWord = "test-forger"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 {
		switch os.Args[1] {
		case Command:
			os.Exit(Main(os.Args[2]))
		case engineWord:
			os.Exit(testEngine(os.Args[2:]))
		case ownerWord:
			os.Exit(testOwner(os.Args[2], os.Args[3]))
		case forgerWord:
			os.Exit(testForger(os.Args[2], os.Args[3]))
		}
	}
	goleak.VerifyTestMain(m)
}

// testEngine behaves as its words say, in their order.
func testEngine(words []string) int {
	terms := make(chan os.Signal, 8)
	signal.Notify(terms, syscall.SIGTERM)
	for _, w := range words {
		word, value, _ := strings.Cut(w, "=")
		n, _ := strconv.Atoi(value)
		switch word {
		case "say":
			fmt.Println(value)
		case "err":
			fmt.Fprintln(os.Stderr, value)
		case "await": // a file
			for _, err := os.Stat(value); err != nil; _, err = os.Stat(value) {
				time.Sleep(time.Millisecond)
			}
		case "flood": // MiB
			line := strings.Repeat("x", 1023) + "\n"
			for range n << 10 {
				_, _ = os.Stdout.WriteString(line)
			}
		case "worker": // that leaves the group and ignores what it can
			cmd := exec.Command("/proc/self/exe", engineWord, "stubborn")
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			if cmd.Start() != nil {
				return 1
			}
		case "core": // that stays in the session, and renames itself as vLLM's do
			cmd := exec.Command("/proc/self/exe", engineWord, "rename", "stubborn")
			cmd.Stdout = os.Stdout
			if cmd.Start() != nil {
				return 1
			}
		case "rename":
			if rename() != nil {
				return 1
			}
			fmt.Println("renamed")
		case "helper": // that forgets its environment, its session and its parent
			if exec.Command("sh", "-c", "env -i setsid sleep 600 >/dev/null 2>&1 &").Run() != nil {
				return 1
			}
		case "orphan": // a child whose parent ends at once
			if exec.Command("sh", "-c", "sleep 0.01 &").Run() != nil {
				return 1
			}
		case "polite":
			<-terms
			fmt.Print("bye")
			return 3
		case "stubborn":
			signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
			time.Sleep(time.Hour)
		case "exit":
			return n
		}
	}
	<-terms
	return 0
}

// rename overwrites what this process was started with, as setproctitle does.
func rename() error {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return err
	}
	f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	from, _ := strconv.ParseInt(f[47], 10, 64) // env_start of proc(5), and env_end
	to, _ := strconv.ParseInt(f[48], 10, 64)
	memory, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = memory.WriteAt(make([]byte, to-from), from)
	return errors.Join(err, memory.Close())
}

// testOwner starts an engine and stays its owner until it is killed.
func testOwner(dir, id string) int {
	c, info, err := Start(context.Background(), os.Args[0], dir, testSpec(id, "say=up", "polite"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	if _, err := c.Watch(context.Background()); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("pid", info.State.PID)
	time.Sleep(time.Hour)
	return 0
}

// testForger listens in a shim's folder and says its first word; "" says nothing.
func testForger(dir, word string) int {
	if os.Chdir(dir) != nil {
		return 1
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socketFile, Net: "unix"})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("listening")
	for {
		c, err := l.Accept()
		if err != nil {
			return 1
		}
		if word != "" {
			_, _ = c.Write([]byte(word + "\n"))
		}
	}
}

// testSpec is the spec of an engine of these tests.
func testSpec(id string, words ...string) Spec {
	path, _ := filepath.Abs(os.Args[0])
	return Spec{
		Cluster: "cluster", Node: "node", Boot: process.BootID(), ID: id,
		Path: path, Argv: append([]string{"engine", engineWord}, words...), Env: os.Environ(), Dir: "/",
		Orphan: time.Minute, Grace: 10 * time.Second,
	}
}
